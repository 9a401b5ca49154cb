"""``driftproof play``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof.cli import agents, scopes
from driftproof.cli.arenas import Subject, arena, normalized
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import Agent, Best, EnvId, Member, Overrides, RunsDir, Trusted, changes
from driftproof.cli.returns import play as play_episodes
from driftproof.cli.threads import use_threads
from driftproof.runs import own_file

if TYPE_CHECKING:
    import numpy as np

    from driftproof.config import Config

_FPS = 30
_MOST_FRAMES = 5_000
_SUFFIXES = (".gif", ".mp4")


def play(
    run: Agent,
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write, .gif or .mp4. Default: play.gif in the run folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show a window instead of writing a file.")] = False,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Number of episodes.")] = 1,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the first episode.")] = None,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the most probable ones.")
    ] = False,
    phase: Annotated[
        int | None, typer.Option("--phase", min=0, help="Drift phase to play in. Default: the last of training.")
    ] = None,
    member: Member = None,
    best: Best = False,
    env: EnvId = None,
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Record a video or GIF of an agent, or show it in a window."""
    from driftproof.cli.evaluation import lasting_of
    from driftproof.state import read

    if output is not None and (show or output.suffix.lower() not in _SUFFIXES):
        raise CommandError("--output must end in .gif or .mp4, and cannot be combined with --show")
    found = agents.find(run, runs_dir, member, best, trust)
    if found.folder is None and env is None:
        raise CommandError(f"{run} is not in a run folder: name the environment to play in with --env ID")
    target = output or (Path("play.gif") if found.folder is None else own_file(found.folder, "play.gif"))
    if not show:
        check_writer(target)
    settings = _rendered(found.config_to_play(changes(env, overrides)), "human" if show else "rgb_array")
    use_threads(settings)
    trained = scopes.trained_on(found.folder, found.config())
    subject = Subject(found.load(), settings, lasting_of(read(found.checkpoint).tree), trained)
    frames: list[Any] = []
    with arena(subject, 1, seed) as place:
        scope = place.enter(phase)
        place.restart()

        def look(local: Mapping[str, Any], _: Mapping[str, Any]) -> None:
            picture = place.venv.env_method("render", indices=[0])[0]
            if picture is not None and len(frames) < _MOST_FRAMES:
                frames.append(picture)

        seen = normalized(subject.agent, place.venv)
        played = play_episodes(subject.agent, seen, episodes, place.seed, not stochastic, look)
        fps = (place.venv.get_attr("metadata", indices=[0])[0] or {}).get("render_fps") or _FPS
    scopes.show(scope, f"return {', '.join(f'{value:.4g}' for value in played.returns)}, played")
    if show:
        return
    if not frames:
        raise CommandError(f"{settings.env.id} rendered no frames (render_mode rgb_array): nothing to record")
    write_video(target, frames, min(int(fps), 50))
    say(f"written to {target}: {len(frames):,} frames")


def _rendered(config: Config, mode: str) -> Config:
    """Configuration with a single environment that renders."""
    env = config.env
    kwargs = {**env.evaluation_kwargs, "render_mode": mode}
    changed = env.model_copy(update={"evaluation_kwargs": kwargs, "n_envs": 1, "vectorization": "in_process"})
    found: Config = config.model_copy(update={"env": changed})
    return found


def check_writer(target: Path) -> None:
    """Refuse a file format whose library is not installed."""
    is_gif = target.suffix.lower() == ".gif"
    if importlib.util.find_spec("PIL" if is_gif else "imageio_ffmpeg") is None:
        needed = "pillow" if is_gif else "imageio[ffmpeg]"
        raise CommandError(f"{target.suffix} needs {needed}: pip install '{needed}'")


def write_video(target: Path, frames: Sequence[np.ndarray[Any, Any]], fps: int) -> None:
    """Write frames as a GIF or a video; smaller frames are padded with white."""
    import numpy as np

    height, width = (max(frame.shape[i] for frame in frames) for i in range(2))
    even = [np.full((height + height % 2, width + width % 2, 3), 255, np.uint8) for _ in frames]
    for picture, frame in zip(even, frames, strict=True):
        picture[: frame.shape[0], : frame.shape[1]] = frame[..., :3]
    if target.suffix.lower() == ".gif":
        from PIL import Image

        first, *rest = [Image.fromarray(picture) for picture in even]
        first.save(target, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    else:
        import imageio.v2 as imageio

        pictures: list[Any] = list(even)
        imageio.mimwrite(target, pictures, fps=fps)
