"""How the embedded demo model was made: data, tokenizer, training, evaluation, export."""
