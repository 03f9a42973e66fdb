"""The order of samples: a pure function of plan and step."""
