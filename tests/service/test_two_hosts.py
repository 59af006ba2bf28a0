"""Two hosts with one torchrun agent each: the same numbers as on one host, and the loss of one of the hosts."""

import time

import pytest

from tests.helpers.patience import at_most
from tests.helpers.run_dir import metrics_of, result_of, run_trainer, write_job
from tests.helpers.service import wait_for
from tests.helpers.two_hosts import start_agents, two_hosts, why_not

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.promise(
        "Two hosts with a torchrun agent each have the losses of one, to the bit; a rank or host that disappears "
        "is named and ends the others."
    ),
]

STEPS = 12


def test_two_hosts_learn_what_one_host_with_two_ranks_learns(tmp_path):
    one = write_job(tmp_path, num_steps=STEPS, name="one-host")
    assert run_trainer(one, processes=2) == 0
    two = write_job(tmp_path, num_steps=STEPS, name="two-hosts")
    with two_hosts() as hosts:
        statuses = [agent.wait(at_most(240)) for agent in start_agents(two, hosts)]
    assert statuses == [0, 0]
    of_one, of_two = ([(row.loss, row.grad_norm) for row in metrics_of(run)] for run in (one, two))
    assert of_one == of_two and len(of_two) == STEPS


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["kill", "unplug"])
def test_a_host_that_is_gone_is_named_and_ends_the_rank_of_the_other(tmp_path, lost, how):
    run, other = write_job(tmp_path, num_steps=10_000), 1 - lost
    with two_hosts() as hosts:
        agents = start_agents(run, hosts)
        told = (run.output_dir / "logs/trainer.log").read_text
        wait_for(lambda: any(row.step >= 3 for row in metrics_of(run)), 120, "third step", told)
        getattr(hosts[lost], how)()
        gone, log = time.monotonic(), run.output_dir / "logs" / ("trainer.log", "rank-0001.log")[other]
        who = f"rank {other} on {hosts[other].name} lost rank {lost} on {hosts[lost].name}, whose log says why"
        wait_for(lambda: who in log.read_text(), 30, who, log.read_text)
        print(f"named after {time.monotonic() - gone:.1f} s")
        if how == "kill":  # torchrun itself tries for minutes to reach an unplugged host
            assert agents[other].wait(at_most(30)) != 0
            assert result_of(run).message.startswith(who)
