"""What `hf-specdec serve` adds to transformers' server: checks of requests, what they ask for, answers, metrics."""
