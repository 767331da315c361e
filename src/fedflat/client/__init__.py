"""The client's round: batches, local steps, teachers, optimisers."""
