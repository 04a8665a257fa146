"""Integrations: one module per outside project and generation, imported only on request."""
