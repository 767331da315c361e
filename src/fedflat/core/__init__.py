"""What everything else is made of: flat vectors, messages, parameters, random numbers, scores."""
