//! What each client has been given, in tokens: the virtual token counters of the fair policy.
//!
//! Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a client's counter rises
//! by the prompt tokens computed for it when a request of it first joins the batch, and by each output token; the lowest
//! counter goes first. A client that comes back is lifted to the lowest counter among those who wait, so that it cannot
//! save up for a burst. Of two clients with requests waiting, the counters differ by no more than the longest prompt
//! plus what the requests of one client in the batch may still give out.
//!
//! Guarantees: at most [`MAX_IDLE`] clients without live requests are remembered. Prompt tokens found in the cache, and
//! tokens computed again after a preemption, are nobody's debt.

use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Clients without live requests whose counters are kept; the lowest are forgotten first.
pub(super) const MAX_IDLE: usize = 256;

/// One client's account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientView {
    pub client: u64,
    /// Prompt tokens computed and output tokens sampled for it; not lifted.
    pub served_tokens: u64,
    /// What the fair policy ranks by: the lowest goes first.
    pub counter: u64,
    pub waiting: u32,
    pub running: u32,
}

#[derive(Debug, Default)]
pub(super) struct Clients {
    by_key: FxHashMap<u64, ClientView>,
    /// Those without live requests.
    idle: BTreeSet<(u64, u64)>, // (counter, client)
    /// The highest counter that was forgotten: nobody starts below it.
    floor: u64,
}

impl Clients {
    /// A request of this client arrives; `least_waiting` is the lowest counter among clients that wait.
    pub fn arrive(&mut self, client: u64, least_waiting: u64) {
        let floor = self.floor;
        let new = ClientView { client, served_tokens: 0, counter: floor, waiting: 0, running: 0 };
        let view = self.by_key.entry(client).or_insert(new);
        if view.waiting + view.running == 0 {
            self.idle.remove(&(view.counter, client));
        }
        if view.waiting == 0 {
            view.counter = view.counter.max(least_waiting);
        }
        view.waiting += 1;
    }

    /// From the queue into the batch, or back.
    pub fn moves(&mut self, client: u64, into_batch: bool) {
        let view = self.live(client);
        let (from, to) = match into_batch {
            true => (&mut view.waiting, &mut view.running),
            false => (&mut view.running, &mut view.waiting),
        };
        *from -= 1;
        *to += 1;
    }

    /// A request ends. `refund` is what was charged for it and never computed.
    pub fn leave(&mut self, client: u64, was_running: bool, refund: u32) {
        let view = self.live(client);
        view.counter = view.counter.saturating_sub(u64::from(refund));
        let count = if was_running { &mut view.running } else { &mut view.waiting };
        *count -= 1;
        if view.waiting + view.running == 0 {
            let counter = view.counter;
            self.idle.insert((counter, client));
            self.forget_some();
        }
    }

    pub fn charge(&mut self, client: u64, tokens: u32) {
        self.live(client).counter += u64::from(tokens);
    }

    /// Undoes a charge.
    pub fn discharge(&mut self, client: u64, tokens: u32) {
        self.live(client).counter -= u64::from(tokens);
    }

    /// Prompt tokens that a committed step computed for the first time, or output tokens.
    pub fn serve(&mut self, client: u64, tokens: u32) {
        self.live(client).served_tokens += u64::from(tokens);
    }

    pub fn get(&self, client: u64) -> Option<&ClientView> {
        self.by_key.get(&client)
    }

    pub fn counter(&self, client: u64) -> u64 {
        self.by_key.get(&client).map_or(self.floor, |view| view.counter)
    }

    /// In no order.
    pub fn iter(&self) -> impl Iterator<Item = &ClientView> {
        self.by_key.values()
    }

    fn live(&mut self, client: u64) -> &mut ClientView {
        self.by_key.get_mut(&client).expect("a client with live requests is known")
    }

    fn forget_some(&mut self) {
        while self.idle.len() > MAX_IDLE {
            let Some((counter, client)) = self.idle.pop_first() else { return };
            self.by_key.remove(&client);
            self.floor = self.floor.max(counter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returning_client_is_lifted_and_a_waiting_one_is_not() {
        let mut clients = Clients::default();
        clients.arrive(1, 0);
        clients.charge(1, 50);
        clients.arrive(2, 50);
        assert_eq!(clients.counter(2), 50);
        clients.charge(2, 30);
        clients.arrive(1, 80);
        assert_eq!(clients.counter(1), 50, "it has been waiting all along");
        clients.leave(2, false, 10);
        clients.arrive(2, 50);
        assert_eq!(clients.counter(2), 70, "what was not computed is given back, what was is kept");
    }

    #[test]
    fn the_memory_of_clients_is_bounded_and_the_forgotten_start_no_lower() {
        let mut clients = Clients::default();
        for client in 0..2 * MAX_IDLE as u64 {
            clients.arrive(client, 0);
            clients.charge(client, 100 + client as u32);
            clients.leave(client, false, 0);
        }
        assert_eq!(clients.iter().count(), MAX_IDLE);
        let least = clients.iter().map(|view| view.counter).min().expect("some are kept");
        clients.arrive(1 << 40, 0);
        assert_eq!(clients.counter(1 << 40) + 1, least);
    }
}
