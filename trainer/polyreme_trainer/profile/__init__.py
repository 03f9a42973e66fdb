"""Cost of a step on the machine at hand: by part of the model, by layer and by exchange."""
