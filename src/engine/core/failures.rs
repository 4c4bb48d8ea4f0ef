//! Runs that end before their time.

use super::super::prefetch::Prefetch;
use super::EngineCore;
use crate::ids::RequestId;
use crate::protocol::RunError;

impl EngineCore {
    /// Ends the run of a request, or of the search that it is a beam of, with an error.
    pub(in crate::engine) fn fail(&mut self, id: RequestId, error: &RunError) {
        let id = self.scheduler.get(id).and_then(|seq| seq.gang()).unwrap_or(id);
        self.tell_failure(id, error);
        // The sink has its terminal event: what the scheduler's end adds is not heard.
        self.abort(id);
    }

    /// Ends every request with an error.
    pub(in crate::engine) fn fail_all(&mut self, error: &RunError) {
        let held = self.prefetch.as_mut().map(Prefetch::release_all);
        self.add_held(held.into_iter().flatten());
        let ids: Vec<RequestId> = self.runs.keys().copied().collect();
        ids.into_iter().for_each(|id| self.fail(id, error));
        self.shared.wake();
    }

    pub(super) fn abort_cancelled(&mut self) {
        // Those who run, so that the cost does not grow with the queue: a waiting one has its command, and holds nothing.
        let running = self.scheduler.running().map(|seq| seq.id());
        let is_cancelled = |id: &RequestId| self.run_by(*id).is_some_and(|run| run.events.is_cancelled());
        let ids: Vec<RequestId> = running.filter(is_cancelled).collect();
        ids.into_iter().for_each(|id| self.abort(id));
    }
}
