"""The datahub as processes: the controller that prepares the data of jobs, and its workers."""
