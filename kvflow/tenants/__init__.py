"""Who asks: tenants, each with a policy and limits of its own, both of which can be changed while turns are served."""

from kvflow.tenants.identity import Identity
from kvflow.tenants.keys import Keys
from kvflow.tenants.tenant import DEFAULT, Limits, Tenant
from kvflow.tenants.tenants import Tenants

__all__ = ["DEFAULT", "Identity", "Keys", "Limits", "Tenant", "Tenants"]
