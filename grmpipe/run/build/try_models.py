"""Tries the models that judge and teach before the first step: an endpoint that serves nothing ends the run there."""

from collections.abc import Mapping

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.composition.composed_judge import get_members, with_own_bounds
from grmpipe.judge.monitor.preflight import NUM_PROMPTS, preflight_judgements, try_prompt
from grmpipe.judge.teaching import Teacher
from grmpipe.models.types import BudgetSpent, EngineDenied, EngineRefused, Message, RequestContext, make_scoring_params
from grmpipe.run.prepare import Prepared
from grmpipe.types import Judge


async def try_judge(prepared: Prepared, judge: Judge, *, is_new: bool) -> None:
    """Raises ConfigError for a judge whose endpoint serves nothing, and at the start of a run for one that gives no
    verdict that can be read; ValueError if nothing answers then.
    """
    config, prompts = prepared.config, prepared.prompts
    first = [prompts.at(prompt_index) for prompt_index in range(min(NUM_PROMPTS, len(prompts)))]
    judge, members = with_own_bounds(judge), get_members(judge)
    asking = {**config.judging.generative, **config.judging.scalar}
    outside = {name: one for name, one in asking.items() if one.model in config.judging.remote_roles}
    try:
        if is_new:
            # The texts of this trial were written in no environment: tools have no final state to read.
            with_text = {name: one for name, one in config.judging.generative.items() if not one.tools.state}
            tried = {**with_text, **outside}
            if problem := await preflight_judgements(judge, members, tried, first):
                raise ConfigError(problem)
        else:
            for name in outside:
                await try_prompt(members.get(name, judge), first[0])
    except BudgetSpent:
        raise
    except EngineDenied as error:
        raise ConfigError(str(error)) from error


async def try_teachers(prepared: Prepared, teachers: Mapping[str, Teacher]) -> None:
    """Raises ConfigError for a teacher whose endpoint serves nothing, or no scores."""
    for name, teacher in teachers.items():
        role = prepared.roles.served[name]
        if role.engine.endpoint is None:
            continue
        token_ids = prepared.policy.renderer.render((Message(role="user", content="1 + 1 = ?"),))
        params = make_scoring_params(len(token_ids) - 1, teacher.top_k)
        context = RequestContext(request_id=f"dry@{name}", group_id="dry", role=name)
        try:
            await teacher.engine.generate(token_ids, params, context)
        except BudgetSpent:
            raise
        except EngineDenied as error:
            raise ConfigError(str(error)) from error
        except EngineRefused as error:
            raise ConfigError(f"{role.key}.path: {error}") from error
