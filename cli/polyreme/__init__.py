"""The composition root: commands, the rank entry point, the run report. Only here do planes meet."""
