"""The page that ``recycle-report`` makes from simulation results: one self-contained HTML file."""
