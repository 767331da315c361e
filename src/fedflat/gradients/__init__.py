"""Oracles answer one question about a model: what is the gradient there?"""
