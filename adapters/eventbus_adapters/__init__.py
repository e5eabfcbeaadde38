"""Bridges to other frameworks and message brokers, one module each.

Importing this package imports none of them: `import eventbus_adapters.<peer>` needs that peer installed, and only it.
"""

from __future__ import annotations

__all__: list[str] = []
