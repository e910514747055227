"""What coordinator and workers say to each other and what follows from it: pure functions over frozen values."""
