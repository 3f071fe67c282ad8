"""The native engine: ``engine`` chooses a tier, ``decoder_tier`` runs a decoder written by hand, ``module_tier`` the model's own forward."""
