//! Commands on cached prefixes: pin a chat's system prompt, pin, name, let go, evict, reset.

use crate::app::chat::ChatId;
use crate::app::inspect::PrefixCommand;
use crate::app::logic::{AppCore, civil_now};
use crate::app::prompt::{Job, Outcome, Purpose};
use crate::app::words;
use crate::engine::Run;
use crate::protocol::{EngineEvent, OwnerTag, PinRequest, RunError};

/// A pin on its way: the prefix is computed first.
pub struct Pinning {
    run: Run,
    name: String,
}

/// Who a pin belongs to: nobody's chat, so that it does not take a chat's name or colour.
fn owner(name: &str, of: u64) -> OwnerTag {
    OwnerTag { id: !of, label: name.to_owned() }
}

pub fn carry_out(core: &mut AppCore, command: PrefixCommand) {
    match command {
        PrefixCommand::Pin { id, name } => {
            let label = if name.is_empty() { "Pinned prefix".to_owned() } else { name.clone() };
            let run = core.engine.keep_prefix(id, Some(name).filter(|n| !n.is_empty()), owner(&label, id));
            hold(core, run, label);
        }
        PrefixCommand::Unpin { id } => drop(core.engine.unpin_prefix(id)),
        PrefixCommand::Evict { id } => drop(core.engine.evict_prefix(id)),
        PrefixCommand::Reset => core.engine.reset_prefix_cache(),
    }
}

/// Asks for the tokens of a chat's system prompt; [`take_tokens`] pins them.
pub fn pin_system_prompt(core: &mut AppCore, chat: ChatId) {
    let (Some(model), Some(target)) = (core.state.model().cloned(), core.state.chat(chat)) else { return };
    let system_prompt = target.settings.system_prompt.clone();
    if system_prompt.trim().is_empty() {
        return;
    }
    let (turns, max_tokens, now) = (Vec::new(), 1, civil_now());
    core.prompts.submit(Job { chat, purpose: Purpose::Pin, system_prompt, turns, max_tokens, model, now });
}

pub fn take_tokens(core: &mut AppCore, chat: ChatId, outcome: Outcome) {
    let title = core.state.chat(chat).map_or_else(String::new, |c| c.title.clone());
    let name = format!("System prompt of “{title}”");
    match outcome {
        Outcome::Tokens(tokens) => {
            let owner = owner(&name, chat.0);
            let pinned_as = Some(name.clone());
            let run = core.engine.pin_prefix(PinRequest { owner, name: pinned_as, tokens, cache_salt: 0, adapter: 0 });
            hold(core, run, name);
        }
        Outcome::Failed(error) => core.state.notice = Some(format!("{name} cannot be pinned: {error}")),
        Outcome::TooLong { .. } => {}
    }
}

fn hold(core: &mut AppCore, run: Result<Run, RunError>, name: String) {
    match run {
        Ok(run) => core.pins.push(Pinning { run, name }),
        Err(error) => core.state.notice = Some(refused(&name, &error)),
    }
}

fn refused(name: &str, error: &RunError) -> String {
    format!("{name} cannot be pinned. {}", words::run_error(error))
}

/// Takes in how pins ended. A run that is held no longer would pin nothing.
pub fn poll(core: &mut AppCore) {
    let mut notices = Vec::new();
    core.pins.retain(|pin| {
        while let Some(event) = pin.run.try_recv() {
            if let EngineEvent::Failed { error } = &event {
                notices.push(refused(&pin.name, error));
            }
            if event.is_terminal() {
                return false;
            }
        }
        true
    });
    notices.extend(gave_way(core));
    core.state.notice = notices.pop().or(core.state.notice.take());
}

/// Pins that let their blocks go since the last call.
fn gave_way(core: &mut AppCore) -> Option<String> {
    let (records, _) = core.engine.telemetry().records_after(core.pins_seen);
    core.pins_seen = records.last().map(|record| record.step).or(core.pins_seen);
    let names = records.iter().flat_map(|record| &record.yielded_pins);
    let name = names.map(|(_, name)| name.as_deref().unwrap_or("A pinned prefix")).next_back()?;
    Some(format!("{name} is no longer pinned: a request needed its blocks"))
}
