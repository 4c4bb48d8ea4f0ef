//! The waiting queue: who is admitted next.
//!
//! Every order is kept as a fixed rank per request, so that taking the next one, putting one back and aborting one cost
//! O(log n), and nothing is looked at again because time passed. Aging is part of the rank: it compares when two requests
//! arrived, in steps, and so needs no clock.
//!
//! | Policy | Next | No request waits for ever because |
//! |---|---|---|
//! | first come, first served | the earliest arrival | nobody overtakes |
//! | priority | lowest `priority · aging_steps + step of arrival` | a request one level better overtakes only what arrived less than `aging_steps` steps before it |
//! | longest prefix | most cached tokens, `max_model_len / aging_steps` of them traded for a step of waiting | nobody overtakes what arrived `aging_steps` steps before |
//! | fair | the client with the lowest counter ([`super::clients`]), in it the earliest arrival | a counter that does not rise becomes the lowest |
//!
//! A preempted request keeps the rank of its arrival, so it goes before the others of its priority or client; under
//! longest prefix it goes before all.
//! Guarantees: removing a request and putting it back restores the order exactly. Cached tokens are looked up at arrival
//! and, for [`RESCORED_PER_STEP`] places per step in turn, while the cache changes: a rank is at most
//! `live requests / RESCORED_PER_STEP` steps old, and counts at most [`MAX_SCORED_BLOCKS`] blocks.

use super::SeqIdx;
use super::clients::{ClientView, Clients};
use crate::ids::RequestId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, btree_map, btree_set};
use std::iter::Peekable;

/// Waiting requests whose cached prefix is looked up again after a step.
pub(super) const RESCORED_PER_STEP: usize = 16;
/// A longer cached prefix counts as one of so many blocks.
pub(super) const MAX_SCORED_BLOCKS: u32 = 256;
/// Priorities beyond count as these.
const MAX_PRIORITY: i32 = 1_000;

/// Who is admitted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueuePolicy {
    /// In order of arrival.
    Fcfs,
    /// The lowest `priority` first, in order of arrival among equals.
    Priority,
    /// The longest cached prefix first.
    LongestPrefix,
    /// Between clients by tokens served, within a client in order of arrival.
    Fair,
}

/// What decides a waiting request's place. It stays with the sequence while that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub id: RequestId,
    pub client: u64,
    pub priority: i32,
    /// The last step planned when it arrived.
    pub since: u64,
    /// Cached tokens as last looked up.
    pub cached_tokens: u32,
    /// What its client pays when it joins: 0 once it has.
    pub cost: u32,
    pub is_resumed: bool,
}

/// (rank, arrival): the lowest goes first.
type Rank = (i64, RequestId);
type Lane = BTreeMap<Rank, Entry>;

#[derive(Clone, Copy, Debug)]
struct Entry {
    idx: SeqIdx,
    cost: u32,
}

/// How ranks are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueConfig {
    pub policy: QueuePolicy,
    pub aging_steps: u32,
    pub max_model_len: u32,
}

#[derive(Debug)]
pub(super) struct WaitingQueue {
    config: QueueConfig,
    len: usize,
    /// All that wait; under the fair policy nothing.
    order: Lane,
    /// Under the fair policy: what waits, by client. No lane is empty.
    lanes: rustc_hash::FxHashMap<u64, Lane>,
    /// The lanes by (counter, first arrival, client).
    ready: BTreeSet<(u64, RequestId, u64)>,
    clients: Clients,
    /// The client that was the last to have nothing waiting any more: the lift of who comes to an empty queue.
    last_left: Option<u64>,
}

/// Restores [`WaitingQueue`] beside the putting back of what was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueMark {
    last_left: Option<u64>,
}

impl WaitingQueue {
    pub fn new(config: QueueConfig) -> Self {
        assert!(config.aging_steps >= 1, "aging_steps must be at least 1");
        WaitingQueue {
            config,
            len: 0,
            order: Lane::new(),
            lanes: Default::default(),
            ready: BTreeSet::new(),
            clients: Clients::default(),
            last_left: None,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn policy(&self) -> QueuePolicy {
        self.config.policy
    }

    /// The request to be admitted next.
    pub fn first(&self) -> Option<SeqIdx> {
        let lane = match self.config.policy {
            QueuePolicy::Fair => &self.lanes[&self.ready.first()?.2],
            _ => &self.order,
        };
        lane.first_key_value().map(|(_, entry)| entry.idx)
    }

    /// A new request.
    pub fn arrive(&mut self, idx: SeqIdx, ticket: &Ticket) {
        let least = match self.ready.first() {
            Some((counter, ..)) => *counter,
            None => self.last_left.map_or(0, |client| self.clients.counter(client)),
        };
        self.clients.arrive(ticket.client, least);
        self.insert(idx, ticket);
    }

    /// Into the batch; the mark restores what [`Self::put_back`] does not.
    pub fn take(&mut self, ticket: &Ticket) -> QueueMark {
        let mark = QueueMark { last_left: self.last_left };
        self.remove(ticket);
        self.clients.moves(ticket.client, true);
        mark
    }

    /// Out of the batch.
    pub fn put_back(&mut self, idx: SeqIdx, ticket: &Ticket) {
        self.clients.moves(ticket.client, false);
        self.insert(idx, ticket);
    }

    /// Back into the batch: undoes [`Self::put_back`].
    pub fn undo_put_back(&mut self, ticket: &Ticket, mark: QueueMark) {
        self.remove(ticket);
        self.clients.moves(ticket.client, true);
        self.last_left = mark.last_left;
    }

    /// Undoes [`Self::take`].
    pub fn undo_take(&mut self, idx: SeqIdx, ticket: &Ticket, mark: QueueMark) {
        self.put_back(idx, ticket);
        self.last_left = mark.last_left;
    }

    pub fn mark(&self) -> QueueMark {
        QueueMark { last_left: self.last_left }
    }

    /// A request ends while it waits or runs; `refund` was charged for tokens that were never computed.
    pub fn leave(&mut self, ticket: &Ticket, was_running: bool, refund: u32) {
        if !was_running {
            self.remove(ticket);
        }
        self.rekey(ticket.client, |clients| clients.leave(ticket.client, was_running, refund));
    }

    /// The client pays for `tokens`.
    pub fn charge(&mut self, client: u64, tokens: u32) {
        self.rekey(client, |clients| clients.charge(client, tokens));
    }

    /// Undoes [`Self::charge`].
    pub fn discharge(&mut self, client: u64, tokens: u32) {
        self.rekey(client, |clients| clients.discharge(client, tokens));
    }

    /// A committed step computed so many prompt tokens for the first time, or sampled so many.
    pub fn serve(&mut self, client: u64, tokens: u32) {
        self.clients.serve(client, tokens);
    }

    /// Looks at a waiting request's place anew; `ticket` is updated.
    pub fn rescore(&mut self, idx: SeqIdx, ticket: &mut Ticket, cached_tokens: u32) {
        if ticket.cached_tokens != cached_tokens {
            self.remove(ticket);
            ticket.cached_tokens = cached_tokens;
            self.insert(idx, ticket);
        }
    }

    /// The next to be admitted first. Under the fair policy as it would go if each paid what it may cost and nobody came.
    pub fn iter(&self) -> QueueIter<'_> {
        let heads = BinaryHeap::new();
        QueueIter {
            order: self.order.values(),
            lanes: &self.lanes,
            unseen: self.ready.iter().peekable(),
            heads,
            left: self.len,
        }
    }

    /// All that wait, in no order and at no cost but the walk: for checks.
    pub fn in_any_order(&self) -> impl Iterator<Item = SeqIdx> + '_ {
        self.order.values().chain(self.lanes.values().flat_map(Lane::values)).map(|entry| entry.idx)
    }

    pub fn client(&self, client: u64) -> Option<&ClientView> {
        self.clients.get(client)
    }

    /// In no order.
    pub fn clients(&self) -> impl Iterator<Item = &ClientView> {
        self.clients.iter()
    }

    fn rank(&self, ticket: &Ticket) -> Rank {
        let (since, aging) = (ticket.since as i64, i64::from(self.config.aging_steps));
        let rank = match self.config.policy {
            QueuePolicy::Fcfs | QueuePolicy::Fair => 0,
            QueuePolicy::Priority => i64::from(ticket.priority.clamp(-MAX_PRIORITY, MAX_PRIORITY)) * aging + since,
            QueuePolicy::LongestPrefix if ticket.is_resumed => i64::MIN,
            QueuePolicy::LongestPrefix => {
                let tokens_per_step = i64::from(self.config.max_model_len.div_ceil(self.config.aging_steps));
                since * tokens_per_step - i64::from(ticket.cached_tokens)
            }
        };
        (rank, ticket.id)
    }

    fn insert(&mut self, idx: SeqIdx, ticket: &Ticket) {
        self.len += 1;
        let (rank, entry) = (self.rank(ticket), Entry { idx, cost: ticket.cost });
        if self.config.policy != QueuePolicy::Fair {
            self.order.insert(rank, entry);
            return;
        }
        let lane = self.lanes.entry(ticket.client).or_default();
        let first = lane.first_key_value().map(|((_, id), _)| *id);
        lane.insert(rank, entry);
        if first.is_none_or(|first| ticket.id < first) {
            let counter = self.clients.counter(ticket.client);
            if let Some(first) = first {
                self.ready.remove(&(counter, first, ticket.client));
            }
            self.ready.insert((counter, ticket.id, ticket.client));
        }
    }

    fn remove(&mut self, ticket: &Ticket) {
        self.len -= 1;
        let rank = self.rank(ticket);
        if self.config.policy != QueuePolicy::Fair {
            self.order.remove(&rank).expect("a waiting request is in the queue");
            return;
        }
        let lane = self.lanes.get_mut(&ticket.client).expect("a client with waiting requests has a lane");
        let first = lane.first_key_value().expect("no lane is empty").0.1;
        lane.remove(&rank).expect("a waiting request is in its client's lane");
        if first != ticket.id {
            return;
        }
        let counter = self.clients.counter(ticket.client);
        self.ready.remove(&(counter, first, ticket.client));
        match lane.first_key_value() {
            Some(((_, next), _)) => drop(self.ready.insert((counter, *next, ticket.client))),
            None => {
                self.lanes.remove(&ticket.client);
                self.last_left = Some(ticket.client);
            }
        }
    }

    /// Changes a counter and the place of the client's lane.
    fn rekey(&mut self, client: u64, change: impl FnOnce(&mut Clients)) {
        let before = self.clients.counter(client);
        change(&mut self.clients);
        let after = self.clients.counter(client);
        if before != after
            && let Some(lane) = self.lanes.get(&client)
        {
            let first = lane.first_key_value().expect("no lane is empty").0.1;
            self.ready.remove(&(before, first, client));
            self.ready.insert((after, first, client));
        }
    }
}

/// Walks the queue; see [`WaitingQueue::iter`]. The first k cost O(k log n).
pub(super) struct QueueIter<'a> {
    order: btree_map::Values<'a, Rank, Entry>,
    lanes: &'a rustc_hash::FxHashMap<u64, Lane>,
    /// Lanes that no head was taken of yet.
    unseen: Peekable<btree_set::Iter<'a, (u64, RequestId, u64)>>,
    heads: BinaryHeap<Reverse<Head<'a>>>,
    left: usize,
}

/// The rest of a lane, ordered by what its client will have paid.
struct Head<'a> {
    key: (u64, RequestId, u64),
    entry: Entry,
    rest: btree_map::Iter<'a, Rank, Entry>,
}

impl PartialEq for Head<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Head<'_> {}

impl PartialOrd for Head<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Head<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl<'a> QueueIter<'a> {
    fn open(&mut self, counter: u64, client: u64, mut rest: btree_map::Iter<'a, Rank, Entry>) {
        if let Some(((_, id), entry)) = rest.next() {
            self.heads.push(Reverse(Head { key: (counter, *id, client), entry: *entry, rest }));
        }
    }
}

impl Iterator for QueueIter<'_> {
    type Item = SeqIdx;

    fn next(&mut self) -> Option<SeqIdx> {
        self.left = self.left.saturating_sub(1);
        if let Some(entry) = self.order.next() {
            return Some(entry.idx);
        }
        while let Some(&&key) = self.unseen.peek() {
            if self.heads.peek().is_some_and(|Reverse(head)| head.key < key) {
                break;
            }
            self.unseen.next();
            self.open(key.0, key.2, self.lanes[&key.2].iter());
        }
        let Reverse(head) = self.heads.pop()?;
        self.open(head.key.0 + u64::from(head.entry.cost), head.key.2, head.rest);
        Some(head.entry.idx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for QueueIter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(policy: QueuePolicy) -> WaitingQueue {
        WaitingQueue::new(QueueConfig { policy, aging_steps: 10, max_model_len: 100 })
    }

    fn ticket(id: u64, client: u64) -> Ticket {
        let id = RequestId(id);
        Ticket { id, client, priority: 0, since: 0, cached_tokens: 0, cost: 10, is_resumed: false }
    }

    /// Request i has place i in storage.
    fn arrive(queue: &mut WaitingQueue, tickets: &[Ticket]) {
        tickets.iter().for_each(|ticket| queue.arrive(ticket.id.0 as SeqIdx, ticket));
    }

    fn order(queue: &WaitingQueue) -> Vec<SeqIdx> {
        queue.iter().collect()
    }

    #[test]
    fn priority_goes_by_level_and_waiting_makes_up_for_levels() {
        let mut queue = queue(QueuePolicy::Priority);
        let with = |id, priority, since| Ticket { priority, since, ..ticket(id, 0) };
        arrive(&mut queue, &[with(1, 1, 0), with(2, 0, 9), with(3, 0, 11), with(4, 1, 0), with(5, -1, 15)]);
        assert_eq!(order(&queue), [5, 2, 1, 4, 3], "one level is worth ten steps");
        arrive(&mut queue, &[with(6, i32::MIN, 5), with(7, -MAX_PRIORITY, 4)]);
        assert_eq!(order(&queue)[..2], [7, 6], "levels are bounded, so that every wait is");
    }

    #[test]
    fn the_longest_prefix_goes_first_unless_another_waited() {
        let mut queue = queue(QueuePolicy::LongestPrefix);
        let with = |id, cached_tokens, since| Ticket { cached_tokens, since, ..ticket(id, 0) };
        let mut first = with(1, 0, 0);
        arrive(&mut queue, &[first, with(2, 40, 1), with(3, 90, 2), with(4, 100, 10)]);
        assert_eq!(order(&queue), [3, 2, 1, 4], "ten tokens are worth a step");
        queue.rescore(1, &mut first, 80);
        assert_eq!(order(&queue), [1, 3, 2, 4]);
        queue.take(&with(4, 100, 10));
        queue.put_back(4, &Ticket { is_resumed: true, ..with(4, 100, 10) });
        assert_eq!(order(&queue)[0], 4, "a preempted request goes first");
    }

    #[test]
    fn clients_take_turns_by_what_they_were_given() {
        let mut queue = queue(QueuePolicy::Fair);
        arrive(&mut queue, &[1, 2, 3, 4].map(|id| ticket(id, 7)));
        arrive(&mut queue, &[5, 6].map(|id| ticket(id, 8)));
        assert_eq!(order(&queue), [1, 5, 2, 6, 3, 4], "ten tokens each, in turn");
        queue.charge(7, 25);
        assert_eq!(order(&queue), [5, 6, 1, 2, 3, 4]);
        assert_eq!(queue.first(), Some(5));
        arrive(&mut queue, &[ticket(9, 9)]);
        assert_eq!(queue.client(9).map(|view| view.counter), Some(0), "the lowest of those who wait");
        queue.charge(8, 30);
        queue.charge(9, 30);
        arrive(&mut queue, &[ticket(10, 10)]);
        assert_eq!(queue.client(10).map(|view| view.counter), Some(25), "nobody saves up by staying away");
    }

    #[test]
    fn who_comes_to_an_empty_queue_starts_where_the_last_left() {
        let mut queue = queue(QueuePolicy::Fair);
        arrive(&mut queue, &[ticket(1, 7)]);
        queue.take(&ticket(1, 7));
        queue.charge(7, 40);
        arrive(&mut queue, &[ticket(2, 8)]);
        assert_eq!(queue.client(8).map(|view| view.counter), Some(40));
    }

    #[test]
    fn taking_and_putting_back_restores_order_and_counters() {
        for policy in [QueuePolicy::Fcfs, QueuePolicy::Priority, QueuePolicy::LongestPrefix, QueuePolicy::Fair] {
            let mut queue = queue(policy);
            let tickets: Vec<Ticket> =
                (1..20).map(|id| Ticket { priority: id as i32 % 3, ..ticket(id, id % 4) }).collect();
            arrive(&mut queue, &tickets);
            let before = (order(&queue), queue.mark());
            let mut taken = Vec::new();
            while let Some(idx) = queue.first() {
                let ticket = tickets[idx as usize - 1];
                taken.push((ticket, queue.take(&ticket)));
                queue.charge(ticket.client, ticket.cost);
            }
            assert_eq!((queue.len(), taken.len()), (0, 19));
            while let Some((ticket, mark)) = taken.pop() {
                queue.discharge(ticket.client, ticket.cost);
                queue.undo_take(ticket.id.0 as SeqIdx, &ticket, mark);
            }
            assert_eq!((order(&queue), queue.mark()), before);
            for ticket in &tickets {
                queue.leave(ticket, false, 0);
            }
            assert_eq!((queue.len(), order(&queue)), (0, Vec::new()));
        }
    }
}
