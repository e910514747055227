"""Workers that join: what the run is to be, who is admitted, who fills a position."""
