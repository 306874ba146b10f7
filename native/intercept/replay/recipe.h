// A call of the driver's as data: the function, and the values that it is called with. One template
// makes the call and tells its values, so that what is listed is what will be done.
#ifndef FLOWGPU_INTERCEPT_REPLAY_RECIPE_H
#define FLOWGPU_INTERCEPT_REPLAY_RECIPE_H

#include <memory>
#include <tuple>
#include <utility>

#include "told.h"

namespace flowgpu::replay {

// The driver's own function, behind the translation, and its symbol.
template <class F> struct Function {
    unsigned symbol;
    F* call;
};
template <class F> Function(unsigned, F*) -> Function<F>;
#define FG_FUNCTION(name)                                                                          \
    ::flowgpu::replay::Function {                                                                  \
        ::flowgpu::I_##name, FG_DRIVER(name)                                                       \
    }

// A kept value as the driver is called with it.
template <class V> decltype(auto) to_call(V& value) {
    if constexpr (IsHandle<std::remove_const_t<V>>::value)
        return to_driver(value);
    else if constexpr (std::is_same_v<std::remove_const_t<V>, std::string>)
        return value.c_str();
    else if constexpr (std::is_class_v<V> || std::is_union_v<V>)
        return &value;
    else
        return static_cast<const V&>(value);
}

template <class Signature> class Recipe;
template <class... Out> class Recipe<CUresult(Out...)> {
  public:
    Recipe() = default;
    Recipe(std::nullptr_t) {}
    // `call` is given what a caller of the recipe gives, and `values`. The program's handles are
    // among those: the driver's change.
    template <class F, class... V>
    Recipe(unsigned symbol, F call, V... values)
        : step_(std::make_shared<With<F, V...>>(symbol, std::move(call), std::move(values)...)) {}

    explicit operator bool() const { return step_ != nullptr; }
    CUresult operator()(Out... out) const { return step_->again(out...); }
    unsigned symbol() const { return step_->symbol; }
    void tell_values(Told& told) const { step_->tell_values(told); }

  private:
    struct Step {
        explicit Step(unsigned of) : symbol(of) {}
        virtual ~Step() = default;
        virtual CUresult again(Out... out) = 0;
        virtual void tell_values(Told& told) const = 0;
        const unsigned symbol;
    };
    template <class F, class... V> struct With : Step {
        With(unsigned of, F how, V... with)
            : Step(of), call(std::move(how)), values(std::move(with)...) {}
        CUresult again(Out... out) override {
            return std::apply([&](V&... each) { return call(out..., each...); }, values);
        }
        void tell_values(Told& told) const override {
            std::apply([&](const V&... each) { tell_list(told, each...); }, values);
        }
        F call;
        std::tuple<V...> values;
    };
    std::shared_ptr<Step> step_;
};

using Make = Recipe<CUresult(void** made)>; // with the driver's handle
using Set = Recipe<CUresult()>;

} // namespace flowgpu::replay

#endif
