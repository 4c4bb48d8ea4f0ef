//! Requests that start as the beginning of another one and share its blocks.
//!
//! Guarantees: a fork computes what it would compute alone, whatever becomes of its parent: while the parent runs, the
//! fork joins with the parent's blocks; when the parent waits, ended or was preempted, it joins with what the prefix
//! cache has of the same tokens, and computes the rest. A fork that waits holds no block. Only whole blocks stay shared:
//! the block that parent and fork go on in differently is copied as the fork joins.

use super::planner::Draft;
use super::sequence::ForkOf;
use super::{NewSequence, Op, Scheduler, SeqIdx, SeqStatus, Sequence};
use crate::ids::RequestId;
use crate::kv::PrefixHit;
use crate::protocol::RunError;

/// What [`Scheduler::fork`] takes.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NewFork {
    /// So many of the parent's first tokens come before the fork's own `prompt`; at most as many as it has. Together they
    /// are the fork's prompt.
    pub keep_tokens: u32,
    /// The fork's own part. Salt and adapter are taken from the parent; `prompt` may be empty when tokens are kept.
    pub sequence: NewSequence,
    pub place: QueuePlace,
}

/// How a fork waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum QueuePlace {
    /// As what belongs to its parent's request: as if it had come with it, and also in a full queue.
    WithParent,
    /// As a request that comes now.
    AsNew,
}

impl Scheduler {
    /// Queues a request that begins like the live request `parent`, or refuses it as [`Scheduler::add`] does. Allowed
    /// while a step is in flight: the tokens that the parent has now count, not the one being sampled.
    ///
    /// Panics when the parent is not live or has fewer tokens.
    pub fn fork(&mut self, parent: RequestId, fork: NewFork) -> Result<(), RunError> {
        self.note(|_| Op::Fork { parent, fork: Box::new(fork.clone()) });
        let NewFork { keep_tokens, sequence: mut new, place } = fork;
        assert!(!self.by_id.contains_key(&new.id), "request {} is added twice", new.id);
        let source = self.get(parent).unwrap_or_else(|| panic!("request {parent} is forked, but not live"));
        assert!(keep_tokens <= source.num_tokens(), "{keep_tokens} of {} tokens are kept", source.num_tokens());
        if place == QueuePlace::AsNew && self.waiting.len() >= self.config.max_waiting as usize {
            return Err(RunError::QueueFull { limit: self.config.max_waiting });
        }
        let (key, since) = (source.key, source.ticket.since);
        (new.cache_salt, new.adapter) = (key.salt, key.adapter);
        new.prompt.splice(0..0, source.tokens[..keep_tokens as usize].iter().copied());
        let mut seq = self.sequence(new)?;
        seq.fork_of = Some(ForkOf { parent, keep_tokens });
        if place == QueuePlace::WithParent {
            seq.ticket.since = since;
        }
        self.arrive(seq);
        Ok(())
    }

    /// What a waiting sequence can join with: the blocks of its running parent where they hold more than the prefix cache
    /// has, `hit`.
    pub(super) fn found(&self, seq: &Sequence, hit: PrefixHit) -> (PrefixHit, Option<SeqIdx>) {
        let Some((idx, tokens)) = self.shared_with_parent(seq) else { return (hit, None) };
        if tokens <= hit.tokens {
            return (hit, None);
        }
        (PrefixHit { num_blocks: tokens / self.kv.block_size(), tokens, num_idle: 0, num_host: 0 }, Some(idx))
    }

    /// Gives a sequence that joins the blocks that were found for it.
    pub(super) fn attach(&mut self, idx: SeqIdx, hit: PrefixHit, parent: Option<SeqIdx>) {
        let mut table = std::mem::take(&mut self.seq_mut(idx).table);
        let query_tokens = self.seq(idx).num_tokens() - 1;
        match parent {
            None => self.kv.attach(&mut table, hit, query_tokens),
            Some(parent) => {
                let parent = self.seqs[parent as usize].as_ref().expect("the parent runs");
                self.kv.share(&mut table, &parent.table, hit.tokens);
                self.kv.own_tail(&mut table, hit.tokens);
            }
        }
        let seq = self.seq_mut(idx);
        seq.table = table;
        seq.num_valid = hit.tokens;
        seq.num_computed = hit.tokens.min(query_tokens);
    }

    /// The running parent whose row computes, in this very step, tokens that `seq` shares: a step later it need not
    /// compute them.
    pub(super) fn parent_computes_now(&self, seq: &Sequence, hit: PrefixHit, draft: &Draft) -> Option<RequestId> {
        let fork = seq.fork_of?;
        let gains = |from: u32| from < fork.keep_tokens.min(seq.num_tokens() - 1) && hit.tokens <= from;
        draft.plan.rows.iter().find(|row| row.request == fork.parent && gains(row.from)).map(|row| row.request)
    }

    /// The running parent, and how many of its computed positions the sequence shares.
    fn shared_with_parent(&self, seq: &Sequence) -> Option<(SeqIdx, u32)> {
        let fork = seq.fork_of?;
        let idx = *self.by_id.get(&fork.parent)?;
        let parent = self.seq(idx);
        // Beams change their tokens behind the prompt from step to step.
        let lasting = if parent.gang.is_some() { parent.num_prompt } else { fork.keep_tokens };
        let tokens = fork.keep_tokens.min(lasting).min(parent.num_computed);
        // What comes back to it in this very step is not there for others yet.
        let has_blocks = parent.status == SeqStatus::Running && parent.restored_from.is_none();
        (has_blocks && tokens > 0).then_some((idx, tokens))
    }
}
