"""From a model to regions: the largest subtrees that can be traced, and back onto the model's own modules."""
