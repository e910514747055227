"""The data plane: what one worker computes and sends, without Lightning."""
