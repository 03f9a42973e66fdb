"""The datahub service under the name that chart 0.1.0 starts."""
