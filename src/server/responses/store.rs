//! Finished responses, kept in memory.

use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// Responses that are kept, and about how many bytes of them.
const MAX_KEPT: usize = 1024;
const MAX_BYTES: usize = 64 << 20;

struct Kept {
    id: String,
    /// Who may see it.
    owner: u64,
    response: Value,
    /// The conversation up to and with the response, as chat messages.
    messages: Vec<Value>,
    bytes: usize,
}

impl Kept {
    fn is(&self, id: &str, owner: u64) -> bool {
        self.id == id && self.owner == owner
    }
}

/// The last responses; the oldest give way.
#[derive(Default)]
pub struct ResponseStore {
    kept: Mutex<VecDeque<Kept>>,
}

impl ResponseStore {
    pub fn insert(&self, (id, owner): (String, u64), response: Value, messages: Vec<Value>) {
        let bytes =
            response.to_string().len() + messages.iter().map(|message| message.to_string().len()).sum::<usize>();
        let mut kept = self.lock();
        kept.push_back(Kept { id, owner, response, messages, bytes });
        while kept.len() > MAX_KEPT || kept.iter().map(|kept| kept.bytes).sum::<usize>() > MAX_BYTES {
            kept.pop_front();
        }
    }

    pub fn get(&self, id: &str, owner: u64) -> Option<Value> {
        self.lock().iter().find(|kept| kept.is(id, owner)).map(|kept| kept.response.clone())
    }

    /// What a further turn goes on from.
    pub fn conversation(&self, id: &str, owner: u64) -> Option<Vec<Value>> {
        self.lock().iter().find(|kept| kept.is(id, owner)).map(|kept| kept.messages.clone())
    }

    /// True when it was there.
    pub fn remove(&self, id: &str, owner: u64) -> bool {
        let mut kept = self.lock();
        let before = kept.len();
        kept.retain(|kept| !kept.is(id, owner));
        kept.len() < before
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }
}
