"""Running a worker's part of the schedule, and of the recovery after a failure."""
