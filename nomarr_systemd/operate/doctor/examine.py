"""All checks, and the function that runs them; a check that is not possible says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nomarr_systemd.core.errors import NomarrError, NotPermitted
from nomarr_systemd.host.scope import Scope
from nomarr_systemd.operate.doctor import files, system, units, workers
from nomarr_systemd.operate.doctor.installation import Finding, Found, Installation, Level

CHECKS: Final[dict[str, Callable[[Installation], Found]]] = {
    "systemd": system.check_systemd,
    "configuration": units.check_configuration,
    "units": units.check_units,
    "services": units.check_services,
    "directives": units.check_directives,
    "supervisor": workers.check_supervisor,
    "failures": files.check_failures,
    "store": files.check_store,
    "rights": files.check_rights,
    "workers": workers.check_workers,
    "journal": system.check_journal,
    "clock": system.check_clock,
}
_ALWAYS: Final = ("systemd", "configuration", "journal", "clock")


def examine(scope: Scope) -> list[Finding]:
    """Run every check; before the first apply only the checks in _ALWAYS."""
    it = Installation(scope)
    found: list[Finding] = []
    told: set[NomarrError] = set()  # several checks may fail with the same error
    for name, check in CHECKS.items():
        if name not in _ALWAYS and not it.is_applied:
            continue
        try:
            found.extend(Finding(name, *each) for each in check(it))  # keeps those before an error
        except NomarrError as error:
            is_closed = isinstance(error, NotPermitted)
            level: Level = "warn" if is_closed else "bad"
            mend = f"{it.nomarrctl} apply" if it.is_damage(error) else error.hint
            mend = f"sudo {it.nomarrctl} doctor" if is_closed else mend
            if error not in told:
                found.append(Finding(name, level, str(error), mend))
            told.add(error)
        except PermissionError as error:
            mend = f"sudo {it.nomarrctl} doctor"
            found.append(Finding(name, "warn", f"this user may not check it: {error}", mend))
        except OSError as error:
            found.append(Finding(name, "bad", str(error)))
    return found
