"""The model: its geometry, where its weights come from, how they are packed, and the plain reference forward."""
