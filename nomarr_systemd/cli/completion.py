"""``nomarrctl completion``: the script by which a shell completes commands, options and the names
of workers. It asks nomarrctl for the names at each completion, so a package can install it.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from nomarr_systemd.cli.common import echo_json, examples, json_option

PROGRAM = "nomarrctl"
VARIABLE = "_NOMARRCTL_COMPLETE"


@click.command(
    epilog=examples(
        "completion bash | sudo tee /etc/bash_completion.d/nomarrctl",
        "completion zsh > ~/.zfunc/_nomarrctl",
        "completion fish > ~/.config/fish/completions/nomarrctl.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that lets SHELL complete commands, options, workers and pools."""
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three  # noqa: S101
    source = kind(ctx.find_root().command, {}, PROGRAM, VARIABLE)
    # Not source(): that runs bash to read its version, and a build machine may have no bash.
    script = source.source_template % source.source_vars()
    if as_json:
        echo_json({"shell": shell, "script": script})
    else:
        click.echo(script)
