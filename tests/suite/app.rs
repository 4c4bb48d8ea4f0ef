//! Tests: app.

mod inspect;
