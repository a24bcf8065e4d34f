//! The numbers that cross from the host to the code of a device, as u32. Each struct of them is declared once, by
//! [`params!`](crate::params!); the backends write it down in their device's language from the names of its fields.

/// An extent as a device takes it. Only an empty tensor may have one past 2^32, and nothing is read of it.
pub fn word(extent: usize) -> u32 {
    u32::try_from(extent).unwrap_or(u32::MAX)
}

/// Declares a struct of u32 fields with `FIELDS`, their names in order, and `words`, their values.
///
/// ```
/// dropless_core::params!(
///     /// The extents of a matrix.
///     Params { rows, columns }
/// );
/// assert_eq!(Params::FIELDS, ["rows", "columns"]);
/// assert_eq!(Params { rows: 2, columns: 3 }.words(), [2, 3]);
/// ```
#[macro_export]
macro_rules! params {
    ($(#[$doc:meta])* $name:ident { $($field:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name { $(pub(crate) $field: u32,)+ }

        impl $name {
            /// The names of the fields in order.
            pub(crate) const FIELDS: &'static [&'static str] = &[$(stringify!($field)),+];

            /// The fields in order.
            pub(crate) fn words(self) -> Vec<u32> {
                vec![$(self.$field),+]
            }
        }
    };
}
