//! In place of [`kv_events`](self) where the program is built without the feature: the option is refused by name.

use super::app::App;
use super::options::KvEventOptions;
use super::run::ServeError;
use std::convert::Infallible;
use std::net::SocketAddr;

/// There are none.
pub struct Sockets(Infallible);

/// Refuses.
pub fn bind(_: &KvEventOptions) -> Result<Sockets, ServeError> {
    Err(ServeError::NoKvEvents)
}

impl Sockets {
    /// Never called.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self.0 {}
    }

    /// Never called.
    pub fn replay_addr(&self) -> Option<SocketAddr> {
        match self.0 {}
    }

    /// Never called.
    pub async fn start(self, _: &App, _: &str) -> Result<(), ServeError> {
        match self.0 {}
    }
}
