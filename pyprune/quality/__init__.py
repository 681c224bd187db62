"""The quality of a model: perplexity by the two published protocols, and zero-shot tasks through lm-eval."""
