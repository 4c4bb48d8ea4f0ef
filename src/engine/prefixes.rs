//! Commands on prefixes: pin, unpin, evict, reset. A pin is a request whose answer is its terminal event.

use super::core::EngineCore;
use super::mailbox::EventSink;
use crate::ids::RequestId;
use crate::protocol::{Decoding, EngineEvent, PinRequest, PrefixCommand, RunError};
use crate::scheduler::NewPin;

impl EngineCore {
    /// Carries a command out, between steps.
    pub(super) fn prefix(&mut self, command: PrefixCommand<EventSink>) {
        match command {
            PrefixCommand::Pin { id, request, events } => self.pin(id, *request, events),
            PrefixCommand::Keep { id, prefix, name, owner, events } => {
                let client = owner.id;
                let text = self.text_output(&[], 0, false);
                let run = self.new_run(id, owner, events, (Decoding::ONE, false), text).for_pin();
                let key = self.scheduler.kv().prefix_tokens(prefix).map(|(_, key)| key);
                let permitted = key.map_or(Ok(()), |key| self.model.loras.check(key.adapter));
                let added = permitted.and_then(|()| self.scheduler.keep_prefix(id, prefix, name, client));
                self.queued(id, run, added);
            }
            PrefixCommand::Unpin { id, told } => {
                let was_pinned = self.scheduler.unpin(id);
                self.tell_room();
                // Whoever asked may have left.
                _ = told.try_send(was_pinned);
            }
            PrefixCommand::Evict { id, told } => {
                let num_evicted = self.scheduler.evict_prefix(id);
                self.forget_on_disk(false);
                _ = told.try_send(num_evicted > 0);
            }
            PrefixCommand::Reset => {
                self.scheduler.reset_prefixes();
                self.forget_on_disk(true);
            }
        }
        self.shared.wake();
    }

    fn pin(&mut self, id: RequestId, request: PinRequest, events: EventSink) {
        let text = self.text_output(&[], 0, false);
        let run = self.new_run(id, request.owner.clone(), events, (Decoding::ONE, false), text).for_pin();
        let added = self.scheduler.add_pin(NewPin {
            id,
            name: request.name,
            tokens: request.tokens,
            cache_salt: request.cache_salt,
            adapter: request.adapter,
            client: request.owner.id,
        });
        self.queued(id, run, added);
    }

    /// Keeps the run of a request that was queued, or tells its client why it was not.
    pub(super) fn queued(&mut self, id: RequestId, run: super::run_state::LiveRun, added: Result<(), RunError>) {
        match added {
            Ok(()) => drop(self.runs.insert(id, run)),
            Err(error) => {
                self.leaves_queue();
                run.events.push(EngineEvent::Failed { error });
                self.shared.wake();
            }
        }
        self.record(None);
    }
}
