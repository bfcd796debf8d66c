"""What keeps tenants apart inside the engines, where a cache that is shared tells who asked what.

Whoever asks for a prompt of another and gets its first token at once, or a `cached_tokens` above 0,
knows that somebody has asked it. So a tenant's requests carry a cache salt of the tenant, which is
part of every key; its own `cache_salt` stands behind it. Their blocks are accounted to the tenant
by name (`kvist.tenant`), so that `kvist cache`, its tokens over HTTP and `store.tenant_quota` mean
the one who holds the API key, whatever the request says of itself. Of `kv_transfer_params` nothing
else is believed that names blocks: NIXL's, as example, name pages of engines, whosever they are.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from kvist.gateway.ask import Asked

_PARAMS = "kv_transfer_params"
_NAMESPACE = "kvist."
_GATEWAYS_OWN = {"kvist.tenant", "kvist.save", "kvist.computed"}


def of_tenant(asked: Asked, tenant: str, *, shares: bool) -> Asked:
    """The request as the engines get it from a tenant who has proven to be `tenant`.

    `shares`: its prefixes are everybody's, but for what its own `cache_salt` keeps apart.
    """
    said = asked.payload.get(_PARAMS)
    params: dict[str, Any] = said if isinstance(said, dict) else {}
    kept = {n: v for n, v in params.items() if n.startswith(_NAMESPACE) and n not in _GATEWAYS_OWN}
    payload = asked.payload | {_PARAMS: kept | {"kvist.tenant": tenant}}
    if shares:
        return Asked(asked.endpoint, payload, asked.fields)
    salt = own_name(tenant, asked.fields.cache_salt or "")
    fields = msgspec.structs.replace(asked.fields, cache_salt=salt)
    return Asked(asked.endpoint, payload | {"cache_salt": salt}, fields)


def own_name(tenant: str, name: str) -> str:
    """A name of a tenant's own, which no other can have: the first colon ends the tenant's name."""
    return f"{quote(tenant, safe='')}:{name}"
