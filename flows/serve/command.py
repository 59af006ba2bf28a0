"""`athanor serve MODEL [MODEL2]`: OpenAI's chat API, and a page that asks one or two models side by side."""

import argparse

from dataset_builders.storage.store import side_dir
from flows.prefect_server.service_record import service_dir
from flows.serve.run_server import ServeSettings, run_server, sources_of
from stages.answer.greedy_decoder import PoolLimits

_BATCH_TOKENS = 131072


def serve_command(args: argparse.Namespace) -> int:
    """Serve the models until a signal stops the server."""
    settings = ServeSettings(
        host=args.host,
        port=args.port,
        engine=args.engine,
        limits=PoolLimits(args.batch, _BATCH_TOKENS),
        queue=args.queue,
        most_tokens=args.max_tokens,
        context=args.context,
        votes_path=args.votes or side_dir(args.root) / "votes.jsonl",
        directory=service_dir(args.root),
    )
    return run_server(sources_of(args.models, args.adapter), settings)
