//! Forks in a world: branches of any live request at any moment, and further choices once a prompt is computed.

use super::runner::{Client, Run};
use super::world::FIRST_PIN;
use crate::ids::{RequestId, TokenId};
use crate::scheduler::{NewFork, NewSequence, QueuePlace, Scheduler, SeqStatus};

/// Forks of one world at most.
const MAX_FORKS: u32 = 24;

impl Run {
    /// Now and then branches off a live request: from a block boundary or beside one half of the time.
    pub(super) fn random_fork(&mut self, in_flight: bool) -> Result<(), String> {
        if self.num_forks >= MAX_FORKS || !self.rng.percent(self.world.fork_percent) {
            return Ok(());
        }
        let live: Vec<RequestId> = self
            .scheduler
            .running()
            .chain(self.scheduler.waiting())
            .map(|seq| seq.id())
            .filter(|id| id.0 < FIRST_PIN)
            .collect();
        if live.is_empty() {
            return Ok(());
        }
        let parent = live[self.rng.range(0, live.len() as u32 - 1) as usize];
        let keep_tokens = self.draw_keep(parent);
        let extra = if self.rng.percent(40) { 0 } else { self.rng.range(1, 6) };
        let own: Vec<TokenId> = (0..extra).map(|_| self.rng.range(0, self.world.vocab_size - 1)).collect();
        let mut new = self.world.branch(&mut self.rng);
        new.prompt = own;
        let place = if self.rng.percent(30) { QueuePlace::WithParent } else { QueuePlace::AsNew };
        self.stats.forks_in_flight += u64::from(in_flight);
        self.stats.forks_of_waiting +=
            u64::from(self.scheduler.get(parent).is_some_and(|seq| seq.status() == SeqStatus::Waiting));
        self.fork(parent, keep_tokens, new, place)
    }

    fn draw_keep(&mut self, parent: RequestId) -> u32 {
        let (size, all) = (self.world.kv.block_size, self.scheduler.get(parent).map_or(1, |seq| seq.num_tokens()));
        let keep = match self.rng.range(0, 3) {
            0 => all,
            1 | 2 => self.rng.range(1, all.div_ceil(size)) * size + self.rng.range(0, 2) - 1,
            _ => self.rng.range(1, all),
        };
        keep.clamp(1, all)
    }

    /// The first token of a request with several choices: the others start from its prompt.
    pub(super) fn fork_choices(&mut self, request: RequestId) -> Result<(), String> {
        if request.0 >= FIRST_PIN {
            return Ok(());
        }
        let client = &self.clients[request.idx() - 1];
        if client.num_choices <= 1 || client.output.len() != 1 {
            return Ok(());
        }
        let (num_choices, base) = (client.num_choices, client.new.clone());
        for choice in 1..num_choices {
            let mut new = NewSequence { seed: base.seed.wrapping_add(u64::from(choice)), ..base.clone() };
            self.stats.choices += 1;
            if self.scheduler.get(request).is_some() {
                new.prompt.clear();
                self.fork(request, base.prompt.len() as u32, new, QueuePlace::WithParent)?;
            } else {
                self.submit(new, None, Scheduler::add_beside)?;
            }
        }
        Ok(())
    }

    fn fork(
        &mut self,
        parent: RequestId,
        keep_tokens: u32,
        mut new: NewSequence,
        place: QueuePlace,
    ) -> Result<(), String> {
        self.num_forks += 1;
        self.stats.forks += 1;
        new.id = RequestId(self.clients.len() as u64 + 1);
        let source = self.scheduler.get(parent).ok_or("only a live request is forked")?;
        let mut whole = source.tokens()[..keep_tokens as usize].to_vec();
        whole.extend_from_slice(&new.prompt);
        let key = source.cache_key();
        let whole = NewSequence { prompt: whole, cache_salt: key.salt, adapter: key.adapter, ..new.clone() };
        let capacity = self.capacity_for(&whole);
        let client = Client::new(&self.world, whole, capacity, None);
        let taken = self.scheduler.fork(parent, NewFork { keep_tokens, sequence: new, place });
        self.enter(client, taken).map_err(|message| format!("fork: {message}"))
    }
}
