"""The data plane: what one worker computes and sends (torch; knows nothing of Lightning)."""
