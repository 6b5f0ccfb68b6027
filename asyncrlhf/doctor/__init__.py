"""What this machine and this model can do, found by trying: probes, small models of a family, short runs on GPUs."""

DOORS = ("gpu_check", "model", "parts", "probes")
