"""Wind tunnel: what faults cost a job under one policy or another, on a simulated clock, before machines are bought."""
