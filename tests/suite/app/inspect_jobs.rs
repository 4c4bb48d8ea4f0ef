//! Requests for the small engine of the Inspect tests.

use super::BLOCK_SIZE;

/// A request to come.
#[derive(Clone, Debug)]
pub struct Job {
    pub arrive: u64,
    pub owner: u64,
    pub label: String,
    /// Jobs of equal prefix share their first `prefix_blocks` blocks.
    pub prefix: u64,
    pub prefix_blocks: u32,
    pub prompt: u32,
    pub output: u32,
    /// Outputs drawn beside each other; the sequences fork when the prompt is read.
    pub choices: u32,
}

/// Four chats that share a system prompt, one API request, and a long prompt that arrives late.
pub fn demo_jobs() -> Vec<Job> {
    let chat = |arrive, owner, label: &str, prompt, output| Job {
        arrive,
        owner,
        label: label.to_owned(),
        prefix: 1,
        prefix_blocks: 6,
        prompt,
        output,
        choices: 1,
    };
    vec![
        chat(1, 11, "Rust lifetimes", 260, 420),
        chat(9, 12, "Poem about the sea", 140, 300),
        chat(22, 13, "Translate a letter", 180, 340),
        chat(40, 14, "Plan a trip to Oslo", 220, 380),
        Job { prefix: 9, prefix_blocks: 0, ..chat(90, 9_000, "API request 7", 300, 160) },
        chat(150, 15, "Summarise the minutes", 640, 200),
        chat(210, 11, "Rust lifetimes", 420, 300),
    ]
}

/// Enough requests to keep a pool of `num_blocks` about `share` full.
pub fn crowd(num_blocks: u32, share: f32, num_requests: u32) -> Vec<Job> {
    let tokens = (num_blocks as f32 * share) as u32 * BLOCK_SIZE / num_requests;
    (0..num_requests)
        .map(|i| Job {
            arrive: 1,
            owner: 20 + u64::from(i % 12),
            label: format!("Chat {}", i + 1),
            prefix: u64::from(i % 3),
            prefix_blocks: 4,
            prompt: (tokens + i * 13).max(100),
            output: 4_000,
            choices: 1,
        })
        .collect()
}

/// The chats of [`demo_jobs`] in a pool too small for them, one of them with three choices.
pub fn crowded_jobs() -> Vec<Job> {
    let mut jobs = demo_jobs();
    jobs[1].choices = 3;
    jobs[1].prompt = 150;
    jobs
}
