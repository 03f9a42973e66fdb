"""The registry: what is known of datasets, samples, actions, artifacts, dead letters, messages, in one SQL schema."""
