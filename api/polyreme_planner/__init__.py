"""Plans of training runs as arithmetic: shapes, layouts, memory, time, traffic, schedules, curriculum."""
