"""What a run is made of: parts of the residual stream and of logits, the logit lens, attention patterns."""
