//! The desktop app: views over plain state; intent comes back as commands.
