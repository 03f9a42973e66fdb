"""The CustomResourceDefinitions, made from the pydantic types: YAML means the same in both worlds.

Pydantic's JSON schema becomes a structural schema (Kubernetes, "Extend the API with CustomResourceDefinitions"):
references inlined, optional instead of nullable, every object's fields listed. What the validators say across fields
becomes CEL, and what may not change while an object exists compares with its old self. Nothing is written by hand
twice: ``tools/generate_crds.py`` writes the files, and a test holds them fresh.
"""
