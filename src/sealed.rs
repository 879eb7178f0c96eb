//! What keeps sealed traits sealed.
//!
//! A trait that the crate's generic code uses is public, and so are the methods of the traits that it stands on: with a
//! bound on it, code outside the crate can call them, hidden or not. So each of these methods takes a [`Key`], which
//! only the crate can name or make. (It has no `Default` and no public function returns one, so inference does not help
//! either.)

/// Proof that the crate itself makes the call.
#[derive(Clone, Copy, Debug)]
pub struct Key(());

/// The one key.
pub(crate) const KEY: Key = Key(());
