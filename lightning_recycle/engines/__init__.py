"""Where workers come from: engines start them, and they find their run in the environment."""
