"""Compare checkpoints turn by turn in one engine: prompts, tokens, first tokens and memory."""
