"""The settings of a run as typed dataclasses, their composition by Hydra, and the checks between them."""
