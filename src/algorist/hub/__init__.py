"""Models that leave the machine: ``card`` (README.md), ``export`` (files, merged adapters), ``upload`` (the hub)."""
