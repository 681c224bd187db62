"""What a model is worth: perplexity by the two published protocols, and zero-shot tasks through lm-eval."""
