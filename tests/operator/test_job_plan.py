"""What the operator decides, in values: a job, its status and what was seen give the next step."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmount_operator.actions import (
    CreateAttempt,
    DeleteJob,
    DeletePod,
    DeleteTrainingJob,
    EndPod,
    SuspendJob,
)
from trainmount_operator.facts import JobFact, NodeFact, Observed, PodFact
from trainmount_operator.job import TrainingJob
from trainmount_operator.plan import Plan, Policy, plan
from trainmount_operator.spec import parse_job
from trainmount_operator.status import JobStatus, Outcome

START = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = Policy()


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def job(**spec: Any) -> TrainingJob:
    base = {
        "experimentName": "digits",
        "compute": {"numAccelerators": 4, "acceleratorsPerNode": 2},
        "command": "python train.py",
    }
    return parse_job(
        {
            "apiVersion": "trainmount.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits", "namespace": "team", "uid": "u", "generation": 1},
            "spec": base | spec,
        }
    )


def kubernetes_job(attempt: int = 0, **fields: Any) -> JobFact:
    base: dict[str, Any] = {"name": f"digits-{attempt}", "uid": f"j{attempt}", "owner_uid": "u"}
    return JobFact(**(base | {"attempt": attempt, "num_nodes": 2} | fields))


def pod(rank: int, attempt: int = 0, **fields: Any) -> PodFact:
    base: dict[str, Any] = {
        "name": f"digits-{attempt}-{rank}-x",
        "uid": f"p{attempt}{rank}",
        "owner_uid": "u",
        "attempt": attempt,
        "node_rank": rank,
        "node_name": f"n{rank}",
        "scheduled_time": START,
        "phase": "Running",
        "running": True,
        "ready": True,
        "started": True,
    }
    return PodFact(**(base | fields))


def ended(rank: int, code: int | None, seconds: float, attempt: int = 0, **fields: Any) -> PodFact:
    base: dict[str, Any] = {
        "phase": "Succeeded" if code == 0 else "Failed",
        "running": False,
        "ready": False,
        "exit_code": code,
        "exit_time": at(seconds),
    }
    return pod(rank, attempt, **(base | fields))


def seen(*pods: PodFact, jobs: tuple[JobFact, ...] = (kubernetes_job(),)) -> Observed:
    return Observed(jobs=jobs, pods=pods)


def step(
    status: JobStatus, observed: Observed, seconds: float, the_job: TrainingJob | None = None
) -> Plan:
    return plan(the_job or job(), status, observed, at(seconds), POLICY)


def running(the_job: TrainingJob | None = None) -> JobStatus:
    """The status of a job whose first attempt runs since second 1."""
    status = step(JobStatus(), Observed(), 0, the_job).status
    return step(status, seen(pod(0), pod(1)), 1, the_job).status


def state(status: JobStatus) -> str:
    condition = status.condition("Succeeded")
    assert condition is not None
    return f"{condition.status} {condition.reason}"


def test_a_new_job_records_its_first_attempt_and_then_creates_it() -> None:
    first = step(JobStatus(), Observed(), 0)
    assert first.status.current_attempt is not None
    assert first.status.current_attempt.number == 0
    assert first.actions == (CreateAttempt(number=0),)
    assert [notice.reason for notice in first.notices] == ["AttemptStarted"]


def test_an_operator_that_died_before_creating_creates_the_same_attempt() -> None:
    first = step(JobStatus(), Observed(), 0)
    again = step(first.status, Observed(), 30)
    assert again.actions == (CreateAttempt(number=0),)
    assert again.status.attempts == first.status.attempts
    assert again.notices == ()


def test_a_created_attempt_is_not_created_again() -> None:
    status = running()
    assert step(status, seen(pod(0), pod(1)), 2).actions == ()
    assert state(status) == "Unknown Running"
    assert status.running_nodes == 2


def test_looking_again_without_a_change_says_the_same() -> None:
    status = running()
    for seconds in (2, 30, 3000):
        assert step(status, seen(pod(0), pod(1)), seconds).status == status


def test_a_job_succeeds_when_every_node_ended_with_0() -> None:
    result = step(running(), seen(ended(0, 0, 5), ended(1, 0, 6)), 7)
    assert state(result.status) == "True Completed"
    assert result.status.completion_time == at(7)
    assert result.actions == ()
    assert [n.reason for n in result.notices] == ["AttemptSucceeded", "Completed"]


def test_one_node_done_and_one_running_is_still_running() -> None:
    result = step(running(), seen(ended(0, 0, 5), pod(1)), 6)
    assert state(result.status) == "Unknown Running"


def test_a_failed_program_costs_a_retry_and_waits_with_growing_delay() -> None:
    status = running()
    delays = []
    seconds = 10.0
    for attempt in range(3):
        current = seen(
            ended(1, 1, seconds, attempt), pod(0, attempt), jobs=(kubernetes_job(attempt),)
        )
        failing = step(status, current, seconds)
        assert failing.status.attempts[-1].outcome is Outcome.FAILED
        assert failing.status.next_attempt_time is not None
        delays.append((failing.status.next_attempt_time - at(seconds)).total_seconds())
        seconds += delays[-1]
        gone = seen(ended(1, 1, seconds, attempt), jobs=(kubernetes_job(attempt, failed=True),))
        began = step(failing.status, gone, seconds)
        assert began.actions == (CreateAttempt(number=attempt + 1),)
        seconds += 1
        new = seen(pod(0, attempt + 1), pod(1, attempt + 1), jobs=(kubernetes_job(attempt + 1),))
        status = step(began.status, new, seconds).status
        seconds += 100
    assert delays == [5, 10, 20]
    assert status.retries == 3


def test_the_gang_is_stopped_before_the_next_attempt_is_recorded() -> None:
    failing = step(running(), seen(ended(1, 1, 10), pod(0)), 10)
    assert failing.actions == (EndPod(name="digits-0-0-x", uid="p00"),)
    still = seen(ended(1, 1, 10), pod(0, ending=True))
    waiting = step(failing.status, still, 500)
    assert waiting.actions == ()
    assert waiting.status.current_attempt is None
    assert state(waiting.status) == "Unknown Stopping"
    quiet = seen(ended(1, 1, 10), ended(0, 143, 12), jobs=(kubernetes_job(failed=True),))
    assert step(waiting.status, quiet, 501).actions == (CreateAttempt(number=1),)


def test_a_gang_that_is_not_whole_cannot_grow_after_its_end() -> None:
    # Node 1 was never created: once node 0 has ended, its Job may make no pod.
    failing = step(running(), seen(ended(0, 1, 10)), 10)
    assert failing.actions == (SuspendJob(name="digits-0"),)


def test_without_retries_left_the_job_fails_with_the_first_cause() -> None:
    the_job = job(maxRetries=0)
    pods = seen(
        ended(0, 1, 12, exit_message="RuntimeError: connection closed by peer"),
        ended(1, 7, 10, exit_message="Traceback\nValueError: bad sample\n"),
    )
    result = step(running(the_job), pods, 13, the_job)
    assert state(result.status) == "False ProgramFailed"
    record = result.status.attempts[-1]
    assert (record.exit_code, record.node_rank, record.node_name) == (7, 1, "n1")
    assert record.message == "node 1 (on n1) failed (exit code 7): ValueError: bad sample"


def test_a_terminal_job_is_never_touched_again() -> None:
    the_job = job(maxRetries=0)
    failed = step(running(the_job), seen(ended(0, 1, 9), ended(1, 1, 9)), 10, the_job).status
    for observed in (Observed(), seen(ended(0, 1, 9))):
        for changed in (the_job, replace(job(suspend=True), generation=2)):
            result = step(failed, observed, 10_000, changed)
            assert result.status == failed
            assert [a for a in result.actions if not isinstance(a, SuspendJob)] == []
            assert result.notices == ()


def test_a_job_fails_for_good_only_when_nothing_of_it_runs_any_more() -> None:
    the_job = job(maxRetries=0)
    stopping = step(running(the_job), seen(ended(0, 1, 9), pod(1)), 10, the_job)
    assert state(stopping.status) == "Unknown Stopping"
    assert stopping.actions == (EndPod(name="digits-0-1-x", uid="p01"),)
    quiet = seen(ended(0, 1, 9), ended(1, 143, 12), jobs=(kubernetes_job(failed=True),))
    failed = step(stopping.status, quiet, 60, replace(the_job, generation=2))
    assert state(failed.status) == "False ProgramFailed"
    assert failed.status.completion_time == at(60)
    assert failed.actions == ()


def test_a_terminal_job_stops_what_still_runs() -> None:
    done = step(running(), seen(ended(0, 0, 9), ended(1, 0, 9)), 10).status
    assert state(done) == "True Completed"
    assert step(done, seen(ended(0, 0, 9), pod(1)), 60).actions == (
        EndPod(name="digits-0-1-x", uid="p01"),
    )


def test_an_out_of_memory_kill_costs_a_retry_and_is_called_so() -> None:
    result = step(running(), seen(ended(0, 137, 9, exit_reason="OOMKilled"), pod(1)), 10)
    record = result.status.attempts[-1]
    assert (record.outcome, record.reason, record.exit_code) == ("Failed", "OutOfMemory", 137)
    assert result.status.retries == 1


INTERRUPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"deletion_time": at(9)}, "PodDeleted"),
    (
        {"deletion_time": at(9), "phase": "Failed", "exit_code": 137, "exit_time": at(9)},
        "PodDeleted",
    ),
    ({"phase": "Failed", "disruption_reason": "Evicted"}, "Evicted"),
    ({"phase": "Failed", "exit_code": 137, "disruption_reason": "Evicted"}, "Evicted"),
    (
        {
            "disruption_reason": "PreemptionByScheduler",
            "disruption_time": at(9),
            "deletion_time": at(9),
        },
        "Preempted",
    ),
    ({"disruption_reason": "DeletionByTaintManager", "disruption_time": at(9)}, "NodeLost"),
    ({"phase": "Failed", "disruption_reason": "UnexpectedAdmissionError"}, "NodeRefused"),
    ({"phase": "Failed", "disruption_reason": "OutOfnvidia.com/gpu"}, "NodeRefused"),
    ({"phase": "Failed", "exit_code": None}, "PodDeleted"),
    ({"ready": False, "node": NodeFact(exists=False)}, "NodeLost"),
    ({"node": NodeFact(exists=True, out_of_service=True)}, "NodeLost"),
]


@pytest.mark.parametrize(("fields", "reason"), INTERRUPTIONS)
def test_an_interruption_costs_no_retry(fields: dict[str, Any], reason: str) -> None:
    the_job = job(maxRetries=0)
    result = step(running(the_job), seen(pod(0), pod(1, **fields)), 10, the_job)
    record = result.status.attempts[-1]
    assert (record.outcome, record.reason) == ("Interrupted", reason)
    assert (result.status.retries, result.status.interruptions) == (0, 1)
    assert not result.status.is_terminal
    assert result.status.next_attempt_time == at(10)


def test_a_pod_that_is_gone_explains_the_failures_of_its_peers() -> None:
    gone = kubernetes_job(failed_ranks=frozenset({0, 1}))
    result = step(running(), seen(ended(0, 1, 9), jobs=(gone,)), 10)
    record = result.status.attempts[0]
    assert (record.outcome, record.reason) == ("Interrupted", "PodDeleted")
    assert record.message == "node 1: its pod is gone"


@pytest.mark.parametrize("max_retries", [0, 3])
def test_a_node_that_turns_out_to_be_gone_excuses_the_failures_of_its_peers(
    max_retries: int,
) -> None:
    the_job = job(maxRetries=max_retries)
    # The peers of a dead node fail at once, while the cluster still believes in it.
    closed = ended(1, 1, 9, exit_message="RuntimeError: connection closed by peer")
    failing = step(running(the_job), seen(pod(0), closed), 10, the_job)
    assert failing.status.attempts[0].reason == "ProgramFailed"
    node = NodeFact(exists=True, not_ready_since=at(50))
    silent = seen(pod(0, ready=False, ending=True, node=node), closed)
    waiting = step(failing.status, silent, 60, the_job)
    assert waiting.wake_time == at(70)
    excused = step(waiting.status, silent, 70, the_job)
    [record] = excused.status.attempts
    assert (record.outcome, record.reason) == ("Interrupted", "NodeLost")
    assert (record.node_rank, record.exit_code) == (0, None)
    assert (excused.status.retries, excused.status.interruptions) == (0, 1)
    [notice] = excused.notices
    assert notice.message == "attempt 0: NodeLost: node 0 (on n0): the node is gone; no retry spent"
    assert excused.actions == (DeletePod(name="digits-0-0-x", uid="p00", force=True),)
    again = step(excused.status, seen(closed), 71, the_job)
    assert CreateAttempt(number=1) in again.actions


def test_an_operator_that_was_away_when_a_node_died_still_blames_the_node() -> None:
    node = NodeFact(exists=True, not_ready_since=at(50))
    result = step(running(), seen(pod(0, ready=False, node=node), ended(1, 1, 9)), 80)
    assert result.status.attempts[0].reason == "NodeLost"
    assert result.status.retries == 0


def test_a_disruption_explains_the_failures_that_follow_it() -> None:
    evicted = pod(0, disruption_reason="EvictionByEvictionAPI", disruption_time=at(9))
    result = step(running(), seen(evicted, ended(1, 1, 9)), 10)
    assert result.status.attempts[-1].reason == "Evicted"


def test_a_failure_explains_the_deletions_that_follow_it() -> None:
    deleted = pod(0, deletion_time=at(9))
    result = step(running(), seen(deleted, ended(1, 1, 9)), 10)
    assert result.status.attempts[-1].reason == "ProgramFailed"


def test_a_job_deleted_by_somebody_is_made_anew_as_another_attempt() -> None:
    result = step(running(), Observed(), 10)
    assert [r.reason for r in result.status.attempts] == ["JobDeleted", ""]
    assert result.actions == (CreateAttempt(number=1),)


def test_interruptions_in_quick_succession_back_off() -> None:
    status, seconds, delays = running(), 5.0, []
    for attempt in range(8):
        lost = seen(pod(1, attempt, deletion_time=at(seconds)), jobs=(kubernetes_job(attempt),))
        status = step(status, lost, seconds).status
        assert status.next_attempt_time is not None
        delays.append((status.next_attempt_time - at(seconds)).total_seconds())
        seconds += delays[-1]
        status = step(
            status, Observed(jobs=(kubernetes_job(attempt, failed=True),)), seconds
        ).status
        pods = (pod(0, attempt + 1), pod(1, attempt + 1))
        status = step(status, seen(*pods, jobs=(kubernetes_job(attempt + 1),)), seconds + 1).status
        seconds += 2
    assert delays == [0, 2, 4, 8, 16, 32, 60, 60]


def test_an_interruption_after_a_long_run_does_not_wait() -> None:
    status = step(running(), seen(pod(1, deletion_time=at(9))), 10).status
    status = step(status, Observed(jobs=(kubernetes_job(failed=True),)), 10).status
    status = step(status, seen(pod(0, 1), pod(1, 1), jobs=(kubernetes_job(1),)), 11).status
    lost = seen(pod(1, 1, deletion_time=at(5000)), jobs=(kubernetes_job(1),))
    assert step(status, lost, 5000).status.next_attempt_time == at(5000)


def test_a_node_is_given_up_only_after_the_tolerance() -> None:
    unwell = pod(1, ready=False, node=NodeFact(exists=True, not_ready_since=at(10)))
    early = step(running(), seen(pod(0), unwell), 29)
    assert state(early.status) == "Unknown Running"
    assert early.wake_time == at(30)
    late = step(running(), seen(pod(0), unwell), 30)
    assert late.status.attempts[-1].reason == "NodeLost"
    assert DeletePod(name="digits-0-1-x", uid="p01", force=True) in late.actions
    assert EndPod(name="digits-0-0-x", uid="p00") in late.actions


def test_a_pod_that_cannot_end_on_a_dead_node_is_forced_away() -> None:
    gone = step(running(), seen(pod(0, deletion_time=at(9)), ended(1, 143, 9)), 10).status
    node = NodeFact(exists=True, not_ready_since=at(12))
    stuck = seen(pod(0, deletion_time=at(9), node=node), jobs=(kubernetes_job(suspended=True),))
    assert step(gone, stuck, 31).actions == ()
    assert step(gone, stuck, 32).actions == (DeletePod(name="digits-0-0-x", uid="p00", force=True),)


def held(reason: str, message: str = "no such thing") -> PodFact:
    return pod(
        1,
        phase="Pending",
        running=False,
        ready=False,
        started=False,
        waiting_reason=reason,
        waiting_message=message,
    )


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ErrImagePull", "ImageUnavailable"),
        ("ImagePullBackOff", "ImageUnavailable"),
        ("ErrImageNeverPull", "ImageUnavailable"),
        ("InvalidImageName", "ImageUnavailable"),
        ("CreateContainerConfigError", "ConfigurationMissing"),
    ],
)
def test_a_misconfiguration_is_named_at_once_and_ends_the_job_at_the_deadline(
    waiting: str, reason: str
) -> None:
    first = step(JobStatus(), Observed(), 0).status
    early = step(first, seen(pod(0), held(waiting)), 5)
    assert state(early.status) == f"Unknown {reason}"
    condition = early.status.condition("Succeeded")
    assert condition is not None
    assert condition.message == f"node 1 (on n1): {waiting}: no such thing"
    assert [notice.reason for notice in early.notices] == [reason]
    assert state(step(early.status, seen(pod(0), held(waiting)), 299).status).startswith("Unknown")
    late = step(early.status, seen(pod(0), held(waiting)), 300)
    assert state(late.status) == f"False {reason}"
    assert late.status.retries == 0
    assert late.actions == (
        EndPod(name="digits-0-0-x", uid="p00"),
        DeletePod(name="digits-0-1-x", uid="p01", force=False),
    )


def test_a_mount_that_fails_is_named_with_the_volume_of_the_job() -> None:
    the_job = job(volumes=[{"path": "/Volumes/main/default/data"}])
    first = step(JobStatus(), Observed(), 0, the_job).status
    warning = 'FailedMount: MountVolume.SetUp failed for volume "volume-0" : no'
    stuck = pod(1, phase="Pending", running=False, ready=False, started=False, warning=warning)
    result = step(first, seen(pod(0), stuck), 6, the_job)
    assert state(result.status) == "Unknown VolumeUnavailable"
    condition = result.status.condition("Succeeded")
    assert condition is not None
    assert condition.message == "node 1 (on n1): volume /Volumes/main/default/data: no"


def unplaced(rank: int) -> PodFact:
    return pod(
        rank,
        phase="Pending",
        running=False,
        ready=False,
        started=False,
        node_name=None,
        scheduled_time=None,
        unschedulable="0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to "
        "deallocate, preemption: 0/2 nodes are available: 2 No preemption victims found.",
    )


def test_more_accelerators_than_there_are_stays_pending_and_says_so() -> None:
    status = step(JobStatus(), Observed(), 0).status
    for seconds in (2, 300, 100_000):
        result = step(status, seen(unplaced(0), unplaced(1)), seconds)
        status = result.status
        assert state(status) == "Unknown Unschedulable"
        assert result.actions == ()
    condition = status.condition("Succeeded")
    assert condition is not None
    assert condition.message == (
        "2 of 2 nodes wait for room: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    )


def test_half_a_gang_gives_its_place_back_after_the_deadline() -> None:
    first = step(JobStatus(), Observed(), 0).status
    assert state(step(first, seen(pod(0), unplaced(1)), 299).status) == "Unknown Unschedulable"
    late = step(first, seen(pod(0), unplaced(1)), 300)
    assert late.status.attempts[-1].outcome is Outcome.INTERRUPTED
    assert late.status.retries == 0


def test_a_quota_is_named_with_its_message() -> None:
    first = step(JobStatus(), Observed(), 0).status
    warned = kubernetes_job(warning="FailedCreate: exceeded quota: team")
    result = step(first, seen(pod(0), jobs=(warned,)), 5)
    assert state(result.status) == "Unknown PodsNotCreated"


def test_the_timeout_counts_from_the_moment_all_nodes_run() -> None:
    the_job = job(timeoutMinutes=1, maxRetries=1)
    status = step(JobStatus(), Observed(), 0, the_job).status
    pods = seen(pod(0), unplaced(1))
    assert state(step(status, pods, 200, the_job).status) == "Unknown Unschedulable"
    status = step(status, seen(pod(0), pod(1)), 210, the_job).status
    early = step(status, seen(pod(0), pod(1)), 269, the_job)
    assert (state(early.status), early.wake_time) == ("Unknown Running", at(270))
    late = step(status, seen(pod(0), pod(1)), 270, the_job)
    assert late.status.attempts[-1].outcome is Outcome.TIMED_OUT
    assert late.status.retries == 1


def test_suspending_stops_the_gang_and_costs_nothing() -> None:
    status = running()
    for round_number in range(3):
        attempt = round_number
        pods = (pod(0, attempt), pod(1, attempt))
        jobs = (kubernetes_job(attempt),)
        stopping = step(status, seen(*pods, jobs=jobs), 100, job(suspend=True))
        assert stopping.actions == tuple(
            EndPod(name=f"digits-{attempt}-{rank}-x", uid=f"p{attempt}{rank}") for rank in (0, 1)
        )
        assert state(stopping.status) == "Unknown Stopping"
        quiet = Observed(jobs=(kubernetes_job(attempt, suspended=True),))
        held_back = step(stopping.status, quiet, 101, job(suspend=True))
        assert state(held_back.status) == "Unknown Suspended"
        assert held_back.actions == ()
        resumed = step(held_back.status, quiet, 102)
        assert resumed.actions == (CreateAttempt(number=attempt + 1),)
        pods = (pod(0, attempt + 1), pod(1, attempt + 1))
        status = step(resumed.status, seen(*pods, jobs=(kubernetes_job(attempt + 1),)), 103).status
    assert (status.retries, status.interruptions) == (0, 0)
    assert {r.outcome for r in status.attempts} == {Outcome.SUSPENDED, None}


def test_a_job_created_suspended_starts_nothing() -> None:
    result = step(JobStatus(), Observed(), 0, job(suspend=True))
    assert result.actions == ()
    assert state(result.status) == "Unknown Suspended"
    condition = result.status.condition("Suspended")
    assert condition is not None and condition.status == "True"


def test_children_of_an_earlier_job_of_the_name_are_removed_first() -> None:
    old_job = kubernetes_job(0, owner_uid="old", uid="jx")
    old_pod = pod(0, owner_uid="old", uid="px")
    result = step(JobStatus(), Observed(jobs=(old_job,), pods=(old_pod,)), 0)
    assert result.actions == (
        DeleteJob(name="digits-0", uid="jx"),
        DeletePod(name="digits-0-0-x", uid="px", force=False),
    )
    assert result.status.attempts == ()
    assert step(result.status, Observed(), 1).actions == (CreateAttempt(number=0),)


def test_the_jobs_of_long_ended_attempts_are_removed() -> None:
    status = running()
    record = status.attempts[-1]
    status = status.with_attempt(replace(record, number=12, job_uid="j12"))
    jobs = tuple(kubernetes_job(n, failed=n < 12) for n in range(13))
    result = step(status, seen(pod(0, 12), pod(1, 12), jobs=jobs), 5)
    assert result.actions == (
        DeleteJob(name="digits-0", uid="j0"),
        DeleteJob(name="digits-1", uid="j1"),
    )


def test_a_finished_job_is_deleted_when_its_time_to_live_is_over() -> None:
    the_job = job(ttlSecondsAfterFinished=60)
    done = step(running(the_job), seen(ended(0, 0, 5), ended(1, 0, 5)), 10, the_job).status
    early = step(done, Observed(), 69, the_job)
    assert (early.actions, early.wake_time) == ((), at(70))
    assert step(done, Observed(), 70, the_job).actions == (DeleteTrainingJob(),)


def test_another_grid_takes_effect_with_the_next_attempt() -> None:
    status = running()
    smaller = replace(job(compute={"numAccelerators": 4, "acceleratorsPerNode": 4}), generation=2)
    same = step(status, seen(pod(0), pod(1)), 5, smaller)
    assert (same.status.nodes, same.actions) == (2, ())
    ending = step(same.status, seen(pod(0), pod(1, deletion_time=at(6))), 6, smaller)
    again = step(ending.status, Observed(jobs=(kubernetes_job(failed=True),)), 6, smaller)
    assert again.status.nodes == 1
    assert again.actions == (CreateAttempt(number=1),)


def test_transition_time_is_kept_while_the_status_is_unchanged() -> None:
    status = running()
    done = step(status, seen(ended(0, 0, 9), ended(1, 0, 9)), 20).status
    succeeded, suspended = done.condition("Succeeded"), done.condition("Suspended")
    assert succeeded is not None and succeeded.last_transition_time == at(20)
    assert suspended is not None and suspended.last_transition_time == at(0)


def test_a_status_survives_its_document() -> None:
    status = step(running(), seen(ended(1, 7, 9), pod(0)), 10).status
    document = status.to_document()
    assert JobStatus.from_document(document) == status
    assert JobStatus.from_document(document).to_document() == document
    assert document["attempt"] == 0


def test_fields_of_other_writers_stay_in_the_status() -> None:
    document = running().to_document() | {"kopf": {"progress": {}}}
    assert JobStatus.from_document(document).to_document() == document
